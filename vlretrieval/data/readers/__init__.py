"""Formats of image-text sets, one file each: files in, records out."""
