"""MiniGrid's worlds of the studies: `python ppo_sprl_minigrid.py --env-id analysis.worlds:MiniGrid-NineRooms-v0`."""

import gymnasium as gym
from minigrid.core.grid import Grid
from minigrid.core.world_object import Goal
from minigrid.envs import FourRoomsEnv


class NineRooms(FourRoomsEnv):
    """3x3 rooms with a gap in every wall between two of them (paper, section 6.6)."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = self.width = self.height = size

    def _gen_grid(self, width, height):
        self.grid = Grid(width, height)
        self.grid.wall_rect(0, 0, width, height)
        side = (width - 1) // 3
        for wall in (side, 2 * side):
            self.grid.vert_wall(wall, 0)
            self.grid.horz_wall(0, wall)
        for wall in (side, 2 * side):
            for corner in (0, side, 2 * side):
                self.grid.set(wall, self._rand_int(corner + 1, corner + side), None)
                self.grid.set(self._rand_int(corner + 1, corner + side), wall, None)
        self.place_agent()
        self.place_obj(Goal())


gym.register("MiniGrid-NineRooms-v0", NineRooms, kwargs={"size": 13})
