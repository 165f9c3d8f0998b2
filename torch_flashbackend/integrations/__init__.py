"""One file per library that has a switch of its own for attention. None of them imports that library unasked."""
