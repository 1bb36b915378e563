"""Values that every layer uses: errors, options, number formats, the C compiler."""
