"""Forward passes: recorded calls, interception, prefix replay, local VJPs, checks."""
