"""How files and texts from elsewhere are read, printed and written: bounded, harmless, whole."""
