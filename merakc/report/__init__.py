"""What people read: text, timelines for Perfetto, pictures."""
