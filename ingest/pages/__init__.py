"""Exporter pages: fetch them, parse the text and turn lines into series."""
