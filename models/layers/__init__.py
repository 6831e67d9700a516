"""Building blocks that the model files share."""
