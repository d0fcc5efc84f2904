"""Pipeline stages: cuts, and graphs between them."""
