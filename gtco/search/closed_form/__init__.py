"""DyGen's closed form: polynomials that give a product's config in constant time."""
