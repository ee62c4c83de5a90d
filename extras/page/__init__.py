"""The page of studio.py: its routes and templates."""
