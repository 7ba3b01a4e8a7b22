"""Forward passes: recorded calls, interception, prefix replay, local products, checks, memory."""
