"""Recovery of gangs that lose nodes: the restart that is enough, replacements, spares and foresight."""
