"""Whether a run that is saved, moved, killed or damaged goes on right, or not at all."""
