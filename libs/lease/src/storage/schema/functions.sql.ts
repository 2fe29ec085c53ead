import { ensurePartitionsSql } from './functions/partitions.sql';
import { enqueueSql } from './functions/enqueue.sql';
import { moveSql } from './functions/move.sql';
import { stepSql } from './functions/step.sql';
import { incarnationSql } from './functions/incarnation.sql';
import { pollSql } from './functions/poll.sql';
import { attestSql, tallySql } from './functions/attest.sql';
import {
  enqueueKeyedSql,
  holdSql,
  releaseKeysSql,
  replaceSql,
  stateSql,
  sweepKeysSql,
  unblockSql,
} from './functions/keys.sql';
import { admitSql, ageSql, capsSql, promotePlacesSql, promoteWaitingSql, spendSql } from './functions/limits.sql';
import { addEdgesSql, followAllSql, followEdgesSql, lockWaitingSql } from './functions/batch-edges.sql';
import {
  afterMembersSql,
  announceSql,
  deleteBatchSql,
  endBatchesSql,
  pruneBatchesSql,
  reopenBatchSql,
  sweepBatchesSql,
} from './functions/batches.sql';
import { Schema } from '../schema';
import { dropEmptyDaySql, finishedDaysSql, pruneSql, pruneTheseSql } from './functions/prune.sql';
import { publicEnqueueSql } from './functions/public.sql';
import { extendSql, heldSql, saveSql } from './functions/save.sql';
import { forgetSql, retakeKeySql, steerSql } from './functions/steer.sql';

/**
 * Planned on the empty tables of a new installation, a plpgsql function keeps those plans: 90 ms a claim at 300 000 rows,
 * 0.5 ms with these settings. They leave the index scans and nested loops that every one of these statements wants, into which no
 * whole table may be read (`material`). Since there is nothing left to choose, nothing is planned anew for each call either, which
 * for a single job was a third of its cost.
 */
const PINNED = {
  enable_seqscan: 'off',
  enable_bitmapscan: 'off',
  enable_hashjoin: 'off',
  enable_mergejoin: 'off',
  enable_material: 'off',
  jit: 'off',
  plan_cache_mode: 'force_generic_plan',
};

const STEP =
  'step_v1(text, bigint[], bigint[], json, bigint, int, text[], text[], int[], int, bigint, int[], int[], int[], bigint[], bigint[], int[], int[])';

const pin = (s: string, signature: string): string =>
  `ALTER FUNCTION ${s}.${signature} ${Object.entries(PINNED)
    .map(([name, value]) => `SET ${name} = ${value}`)
    .join(' ')}`;

/** Every function carries a version in its name, so that old and new workers live side by side in a rolling deploy. */
export const functionsSql = (s: string): string[] => [
  ...incarnationSql(s),
  ensurePartitionsSql(s),
  enqueueSql(s),
  moveSql(s),
  stepSql(s),
  pollSql(s),
  attestSql(s),
  tallySql(s),
  stateSql(s),
  unblockSql(s),
  releaseKeysSql(s),
  holdSql(s),
  replaceSql(s),
  enqueueKeyedSql(s),
  sweepKeysSql(s),
  admitSql(s),
  promotePlacesSql(s),
  promoteWaitingSql(s),
  capsSql(s),
  spendSql(s),
  ageSql(s),
  saveSql(s),
  extendSql(s),
  heldSql(s),
  forgetSql(s),
  retakeKeySql(s),
  steerSql(s),
  publicEnqueueSql(s),
  announceSql(s, Schema.ofQuoted(s).channel),
  endBatchesSql(s),
  lockWaitingSql(s),
  followEdgesSql(s),
  followAllSql(s),
  afterMembersSql(s),
  addEdgesSql(s),
  reopenBatchSql(s),
  sweepBatchesSql(s),
  deleteBatchSql(s),
  pruneBatchesSql(s),
  finishedDaysSql(s),
  pruneTheseSql(s),
  pruneSql(s),
  dropEmptyDaySql(s),
  // Waiting longer for a key or a place would keep outcomes from being recorded.
  ...['promote_places_v1(text[])', 'release_keys_v1(bigint[])', 'unblock_v1(bigint, text)'].map(
    (signature) => `ALTER FUNCTION ${s}.${signature} SET lock_timeout = '100ms'`,
  ),
  // An OR of two indexes; without it every settle of a keyed job reads all keys (122 ms at 300 000).
  `ALTER FUNCTION ${s}.release_keys_v1(bigint[]) SET enable_bitmapscan = on`,
  `ALTER FUNCTION ${s}.after_members_v1(bigint[], bigint[]) SET lock_timeout = '100ms'`,
  `ALTER FUNCTION ${s}.delete_batch_v1(bigint) SET lock_timeout = '200ms'`,
  `ALTER FUNCTION ${s}.steer_v1(text, bigint[], text, int) SET lock_timeout = '250ms'`,
  // Completions take their leases without skipping: one that a user's transaction keeps locked must not hold up the others for long.
  `ALTER FUNCTION ${s}.${STEP} SET lock_timeout = 1000`,
  pin(s, 'enqueue_v1(json)'),
  pin(s, 'move_v1(json, boolean, boolean)'),
  pin(s, STEP),
  // What these call inherits their settings: the settings of a function cost it 10 µs a call.
  ...[
    'enqueue_keyed_v1(json)',
    'sweep_keys_v1(text, text, int)',
    'promote_waiting_v1(text, int)',
    'age_v1(int)',
    'save_v1(json, boolean)',
    'extend_v1(bigint, bigint, text, bigint, bigint)',
    'held_v1(bigint, bigint, text, boolean, boolean)',
    'steer_v1(text, bigint[], text, int)',
    'prune_v1(bigint, bigint, bigint, timestamptz, bigint, int)',
    'after_members_v1(bigint[], bigint[])',
    'add_edges_v1(bigint, bigint[], bigint[], boolean[], boolean)',
    'sweep_batches_v1(bigint, bigint, int, int)',
    'delete_batch_v1(bigint)',
    'prune_batches_v1(bigint, bigint, bigint, timestamptz, bigint)',
  ].map((signature) => pin(s, signature)),
  pin(s, 'poll_v1(text[], text[], int, boolean)'),
  pin(s, 'tally_v1(text, bigint, bigint)'),
  pin(s, 'attest_v1(text, bigint[], bigint[], bigint, bigint, bigint)'),
];
