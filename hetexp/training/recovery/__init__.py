"""How a rank goes on when memory runs out or another rank is lost."""
