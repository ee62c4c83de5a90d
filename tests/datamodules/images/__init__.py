"""Pictures, captions and drawn shapes."""
