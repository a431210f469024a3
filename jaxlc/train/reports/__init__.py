"""What a run prints, logs and draws."""
