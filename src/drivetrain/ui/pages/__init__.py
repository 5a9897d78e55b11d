"""HTML pages: one file each, without a network, in one visual language (docs/design-pages.md)."""
