"""multi_node"""
