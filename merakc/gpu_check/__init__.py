"""Whether merakc is right and fast on this machine's GPUs: what a first day would find out."""
