"""What several tests need: commands, tiny pipelines, pictures, probes."""
