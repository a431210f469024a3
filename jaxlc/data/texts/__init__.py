"""Sources of documents: files, records, and a built-in source."""
