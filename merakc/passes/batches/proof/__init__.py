"""The certificate: parts against the whole batch, with numbers."""
