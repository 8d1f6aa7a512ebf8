"""The life of processes: how they meet, agree, work for each other and end; and their heap."""
