"""Exporter pages: modules that fetch them, parse them and convert their lines into series."""
