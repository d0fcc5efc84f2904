"""Training programs as people write them, with the lines that merakc asks for marked `# merakc`.

A marked line is left out of the program for one process, or is what follows the mark there.
"""
