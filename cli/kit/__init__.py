"""Parts that several commands share: options, output, tables and logs."""
