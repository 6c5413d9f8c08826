"""hang"""
