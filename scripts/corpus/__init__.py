"""Parts of `scripts.make_corpus`: packages, their files, text, selection of documents, and the tables."""
