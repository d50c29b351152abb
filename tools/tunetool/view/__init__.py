"""What is shown of a record, as data: the model that renderers lay out, and what the views of all kinds share."""
