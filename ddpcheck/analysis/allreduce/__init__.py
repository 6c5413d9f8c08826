"""Verification of the AllReduce: is each reduced gradient the mean of the local ones?"""
