"""Studies: the paper's claims, checked by a command each."""
