"""Several machines that train one model: how they meet, and how the leader's launcher reaches the others."""
