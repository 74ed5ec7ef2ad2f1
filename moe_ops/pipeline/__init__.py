"""The steps of a layer around the products that a backend provides."""
