import {
  crashServer,
  crowd,
  diskFull,
  endBeatSession,
  endEffect,
  endMain,
  endPool,
  errors,
  newerSchema,
  readOnly,
  restartServer,
  rowLocks,
  tableLock,
} from './database-faults';
import type { Fault } from './fault';
import { blackHole, cutLine, delayLine, halfOpen, loseAnswers, loseReplies, partition } from './line-faults';
import {
  block,
  clockSkew,
  endBeat,
  freeze,
  freezeLeader,
  hogPool,
  kill,
  killLeader,
  olderCode,
  poison,
  redeploy,
} from './process-faults';

export type { Done, Fault, Stage } from './fault';

export const FAULTS = {
  kill,
  killLeader,
  freeze,
  freezeLeader,
  redeploy,
  olderCode,
  newerSchema,
  clockSkew,
  block,
  endBeat,
  hogPool,
  poison,
  cutLine,
  delayLine,
  blackHole,
  halfOpen,
  partition,
  loseReplies,
  loseAnswers,
  endPool,
  endBeatSession,
  endMain,
  endEffect,
  errors,
  rowLocks,
  tableLock,
  readOnly,
  crowd,
  diskFull,
  crashServer,
  restartServer,
} satisfies Record<string, Fault>;

export type FaultName = keyof typeof FAULTS;

export interface Scenario {
  /** Each as often as it stands here. */
  faults: readonly FaultName[];
  /** The pause between two, in ms. */
  everyMs: readonly [min: number, max: number];
}

/**
 * Some worker must live for a TTL now and then: who has not had one of steady beats declares nobody dead, since after a gap it was the database that
 * was away.
 */
export const SCENARIOS: Record<string, Scenario> = {
  kill: { faults: ['kill'], everyMs: [1500, 4000] },
  leader: { faults: ['killLeader', 'freezeLeader'], everyMs: [500, 3000] },
  freeze: { faults: ['freeze'], everyMs: [100, 1000] },
  beat: { faults: ['endBeat', 'endBeatSession'], everyMs: [500, 2000] },
  deploy: { faults: ['redeploy', 'redeploy', 'olderCode', 'newerSchema'], everyMs: [500, 2000] },
  skew: { faults: ['clockSkew'], everyMs: [100, 1000] },
  block: { faults: ['block'], everyMs: [300, 2000] },
  poison: { faults: ['poison'], everyMs: [2000, 6000] },
  line: {
    faults: ['cutLine', 'delayLine', 'blackHole', 'halfOpen', 'partition', 'loseReplies', 'loseAnswers'],
    everyMs: [100, 1000],
  },
  sessions: { faults: ['endPool', 'endPool', 'endBeatSession', 'endMain', 'endEffect'], everyMs: [50, 400] },
  errors: { faults: ['errors', 'rowLocks', 'tableLock'], everyMs: [200, 1500] },
  readonly: { faults: ['readOnly'], everyMs: [1000, 4000] },
  exhaust: { faults: ['crowd', 'hogPool'], everyMs: [1000, 3000] },
  disk: { faults: ['diskFull'], everyMs: [1000, 4000] },
  server: { faults: ['crashServer', 'restartServer'], everyMs: [2000, 6000] },
};

SCENARIOS.all = {
  faults: Object.keys(FAULTS).filter((name) => name !== 'poison' && name !== 'newerSchema') as FaultName[],
  everyMs: [100, 1500],
};
