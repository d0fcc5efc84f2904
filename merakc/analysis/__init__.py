"""What values of a graph share memory, how long they live, and what follows from it."""
