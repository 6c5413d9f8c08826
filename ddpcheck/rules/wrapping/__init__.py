"""wrapping"""
