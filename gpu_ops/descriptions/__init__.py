"""What a user writes down: frozen, validated, complete, as JSON; a file per kind of operator. No engine code."""
