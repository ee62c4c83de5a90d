"""Output of a run for people: the report page, the model card, commands, and the summary of a sweep."""
