"""Who met what, when: tables of interactions and items as tasks on them find them."""
