"""The eviction policies in plain Python, with lists and without a thought for speed.

A policy sees blocks: any object with `holders`, `level` (cached blocks of lower levels go first) and `key` (what is in it).
cache(block): nobody holds it any more. hold(block): somebody does again. hit(block): it was found by its key, after hold.
forget(block): it is evicted, or its contents change. victim(): the cached block that goes next."""


class Lru:
    def __init__(self, levels):
        self.levels, self.queues = levels, {"lru": []}

    def where(self, block):
        return next((queue for queue in self.queues.values() if block in queue), None)

    def choose_queue(self, block):
        return next(iter(self.queues))

    def cache(self, block):
        self.queues.setdefault(self.choose_queue(block), []).append(block)

    def hold(self, block):
        self.where(block).remove(block)

    def hit(self, block):
        pass

    def victim(self):
        return next((queue[0] for _, queue in sorted(self.queues.items()) if queue), None)


class Lfu(Lru):
    """A queue for each number of hits, up to 63."""

    def choose_queue(self, block):
        return self.levels.uses.get(block, 0)

    def hit(self, block):
        self.levels.uses[block] = min(self.levels.uses.get(block, 0) + 1, 63)

    def __init__(self, levels):
        super().__init__(levels)
        self.queues = {}


class Fifo(Lru):
    """A block keeps its place while it is held. One whose turn came then goes first once it is released."""

    def __init__(self, levels):
        self.levels, self.queues = levels, {"a due": [], "b fifo": []}

    def cache(self, block):
        if self.where(block) is None:
            self.queues["a due" if self.levels.uses.get(block) else "b fifo"].append(block)

    def hold(self, block):
        pass

    def victim(self):
        for queue in self.queues.values():
            while queue:
                if not queue[0].holders:
                    return queue[0]
                self.levels.uses[queue.pop(0)] = 1
        return None


class Slru(Lru):
    def __init__(self, levels):
        self.levels, self.queues = levels, {"a probation": [], "b protected": []}

    def hit(self, block):
        self.levels.uses[block] = 1

    def cache(self, block):
        protected = self.queues["b protected"]
        (protected if self.levels.uses.get(block) else self.queues["a probation"]).append(block)
        if sum(len(level.queues["b protected"]) for level in self.levels.levels.values()) > self.levels.num_blocks * 8 // 10:
            oldest = protected.pop(0)
            self.levels.uses[oldest] = 0
            self.queues["a probation"].append(oldest)


class S3Fifo(Lru):
    def __init__(self, levels):
        self.levels, self.queues = levels, {"small": [], "main": []}
        self.place = levels.place  # block -> "small" or "main", from the first time that it is cached

    def cache(self, block):
        if block not in self.place:
            ghosts = self.levels.ghosts
            recent = len(ghosts) - (self.levels.num_blocks - self.levels.num_blocks // 10)
            is_ghost = block.key in ghosts[max(recent, 0):]
            if is_ghost:
                ghosts[len(ghosts) - 1 - ghosts[::-1].index(block.key)] = None
            self.place[block] = "main" if is_ghost else "small"
        if self.where(block) is None:
            self.queues[self.place[block]].append(block)

    def hold(self, block):
        pass

    def hit(self, block):
        self.levels.uses[block] = min(self.levels.uses.get(block, 0) + 1, 3)

    def victim(self):
        small, main = self.queues.values()
        while small or main:
            is_small = bool(small) and (not main or len(small) >= max(self.levels.num_blocks // 10, 1))
            block = (small if is_small else main)[0]
            uses = self.levels.uses.get(block, 0)
            if not block.holders and uses <= is_small:
                if is_small:
                    self.levels.ghosts.append(block.key)
                return block
            (small if is_small else main).pop(0)
            if block.holders:
                continue  # placed again when it is released
            self.levels.uses[block] = 0 if is_small else uses - 1
            self.place[block] = "main"
            main.append(block)
        return None


POLICIES = {"lru": Lru, "priority": Lru, "lfu": Lfu, "fifo": Fifo, "slru": Slru, "s3fifo": S3Fifo}


class Oracle:
    """One policy for each level."""

    def __init__(self, name, num_blocks):
        self.name, self.num_blocks = name, num_blocks
        self.levels, self.uses, self.ghosts, self.place = {}, {}, [], {}

    def at(self, block):
        return self.levels.setdefault(block.level, POLICIES[self.name](self))

    def cache(self, block):
        self.at(block).cache(block)

    def hold(self, block):
        self.at(block).hold(block)

    def hit(self, block):
        self.at(block).hit(block)

    def leave(self, block):
        """Before the level of a block changes."""
        queue = self.at(block).where(block)
        if queue:
            queue.remove(block)

    def forget(self, block):
        self.leave(block)
        self.uses.pop(block, None)
        self.place.pop(block, None)

    def victim(self):
        for _, level in sorted(self.levels.items()):
            block = level.victim()
            if block is not None:
                return block
        raise AssertionError("nothing is cached")
