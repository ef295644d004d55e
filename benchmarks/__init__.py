"""One file a hot path; one JSON line a case."""
