"""Says which rank is lost or went another way, by a channel beside the work."""
