"""What goes over the wire: request models that validate, response models that describe."""
