"""What a step minimizes: losses, preservation, sliders, preferences."""
