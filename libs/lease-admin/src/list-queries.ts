import { JOB_STATES, type JobState } from '@leasehold/nestjs';
import { Transform } from 'class-transformer';
import { IsIn, IsInt, IsNotEmpty, IsOptional, IsString, Matches, Max, Min } from 'class-validator';

const asNumber = ({ value }: { value: unknown }): unknown =>
  typeof value === 'string' && /^\d{1,9}$/.test(value) ? Number(value) : value;

/** What `GET jobs` may be asked. */
export class ListJobsQuery {
  @IsOptional()
  @IsIn(JOB_STATES)
  state?: JobState;

  @IsOptional()
  @IsString()
  @IsNotEmpty()
  kind?: string;

  @IsOptional()
  @IsString()
  @IsNotEmpty()
  queue?: string;

  @IsOptional()
  @IsString()
  @IsNotEmpty()
  tag?: string;

  @IsOptional()
  @Transform(asNumber)
  @IsInt({ message: 'limit must be a whole number from 1 to 1000' })
  @Min(1)
  @Max(1000)
  limit?: number;

  @IsOptional()
  @IsString()
  @Matches(/^\d{1,19}$/, { message: 'after must be a job id, decimal text: the next of the page before' })
  after?: string;
}

/** What `GET workers` may be asked. */
export class ListWorkersQuery {
  @IsOptional()
  @IsIn(['true', 'false'])
  active?: 'true' | 'false';
}
