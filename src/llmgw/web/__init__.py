"""The pages that a person opens: templates and a few lines of Quart, and no JavaScript that is needed to read them."""
