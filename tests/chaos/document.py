def write_page(*args):
    pass
