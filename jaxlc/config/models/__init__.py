"""Model settings: presets, families, and Hugging Face's config.json."""
