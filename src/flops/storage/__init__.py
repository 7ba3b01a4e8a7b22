"""Files that are whole or absent, full disks, and values read from files."""
