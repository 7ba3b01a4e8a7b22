"""Models, servers and cases that several tests share."""
