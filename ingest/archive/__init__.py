"""The archive: every accepted sample and event, once, in Parquet files."""
