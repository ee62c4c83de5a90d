"""Images, captions and drawn shapes."""
