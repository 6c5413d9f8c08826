"""live_compare"""
