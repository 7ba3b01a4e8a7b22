"""Reports: tables and plots for people to look at."""
